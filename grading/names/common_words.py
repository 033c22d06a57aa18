"""Words that may be a name but are common in homework.

Without the other part of a name, or in lower case, they are no name.

The list has English words that are also names; terms of statistics and programming languages; people after whom methods
are named; months, days, and places that data is about; and short words of the languages in which students write. A word
that is missing here is still safe if many in the class use it: see `grading.names.pseudonyms`.
"""

COMMON_WORDS = frozenset(
    """
    a able about above across act add after again age ago aim air all also always am among an and angel angle
    answer any apple are area arm art as ash ask at author away back bad bag bake baker ball band bank banks bar
    barber base basic bay be bean bear beck bee bell below bench bend berry best beta better between big bill bin
    bird bishop bit black blank blue bloom boat body bold bond book booth both bow box boy branch brand brave
    bread break brick bridge bright bring broad brook brooks brown brush buck bud build burn bush busy but buy by
    cake call can candy cane cap car card care carol carpenter carry cart carver case cash castle cat cause cell
    center chain chance change chapman char chart chase check cherry child choice church city clark class clay
    clean clear clerk click close cloud code col cold cole cook cool cooper corner cost could count court cover
    cox crane cross crow crystal cup cut cycle daily daisy dale dance date dawn day days deal dean deep deer delta
    demand did diff differ dim do does dog dollar dolly domain done door dot double down draw drake drew drop dry
    duke dusty each earl earn earth ease east easy edge egg eight elder else empty end english enter error even
    event ever every example faith fair fall false far farm farmer fast favor feather fee few field file fill
    filter final find fine finish fire first fish fisher fit five fix flag flat float flood floor flower floyd fly
    fold folk follow for force ford forest form foster fountain four fox frame france frank free freeman french
    fresh friend from frost full function gale game garden gardener gate gay gene general get gift ginger give
    glass glen go goal gold golden good goods grace grant graph grass gray great green grey grid ground group
    grove grow guest guide gun guy had hale half hall hand handy happy hard hardy harmony harp has hash hat have
    haven hawk hay hazel he head heart heat heath heather heavy help her here hero hey high hill him his hit
    holiday holly holmes home honey honor hood hope horn horse host hot hour house how hull hunt hunter i ice idea
    if image in index input int interest into iris is isle it item its ivory ivy jack jade james jar jasmine
    jasper jay jean jewel job joint jot joy jude judge july june just justice keen keep key keys kind king kit
    kite knight know label lady lake lamb lambda lamp land lane large lark last late later law lay lead leaf leap
    learn least leave left lemon length less let level library life light like lily limit lin line link lion list
    little live lock log long look loop lord lot love low lower lucky lung mack magic main make male man manning
    many map maple mar march mark market marks marsh marshal mason mass master mat match matrix matter max may
    mayor me mead mean means median melody men mercy merge merit merry middle mile miles mill miller min mind mine
    mint miss mode model moon moor more moss most mount move much must my na name nan near neat need new next nice
    night nine no noble nor norm normal north not note now null number oak object odd of off often oh old olive on
    once one only opal open or order other our out over own pace page paige paint pair palm pan park parker parse
    part pass past pat patch path patience pay peace pear pearl pen pence penny people per percy phase phoenix
    pick pie piece pierce pike pine pink pipe place plain plan plane plant plot plus poe point pole pool poor pope
    port post potter pound power pratt present press price pride prime print prior pro proper prove pure put quick
    quiet quill race rain ran random range rank rate raven raw ray reach read real reason red reed reef rest
    result return rice rich ride right ring rise river road rob robin rock rod root rope rose rosemary ross round
    row rows royal ruby rule run rush rust rusty sage said sail sale sales salt same sample sand sandy sat savage
    save saw say scale scan school score scott sea seal search season second see seed self sell send sense
    serenity series set seven shape sharp shaw she shelf shell shepherd shift shine ship shore short should show
    side sign silver simple since single six size skip sky slice slope small smart smith snow so solo some son
    song sort source south spark speed spell spring square star start state stay steel step stone stop storm story
    straw strong student sue sugar sum summary summer summers sun sunny swan sweet swift table tail take tall tan
    tank task tate taylor tea teach team tell temple ten term test text than that the their them then there these
    they thing think this thorn those three through thus tie tiger tile time tiny tip title to today too tool top
    total tower town track trace train tree trend trial trinity true trust try tuck turn turner twin two type
    uncle under union unique unit until up upper use user val value var vector very view vine violet wade wait
    walk walker wall want ward warm was washer watch water waters way we weaver web week weight well wells were
    west what wheat wheel when where which while white who whole why wide wild will win wind window wine wing
    winner winter wise wish with within without wolf wood woods word work world worth would wren write wrong yarn
    year yes yet york you young your zero zone

    abs append apply array assert async await bool break byte cast cat chr class concat cor cumsum data def del
    desc dict dplyr elif enum eval exec except false filter finally floor format frame from glm goto head hist idx
    import inf insert inner int isin isna join json key lag lambda lapply len let lib lm loc map melt min mod
    mutate nrow ncol none nth nil numpy object ord outer pandas pd np df pass pi pivot pop pow print qnorm
    quantile query raise range rank rbind cbind regex rep repr return rev rnorm round sapply scale script sd
    select self seq series session set shape sort split sql sqrt str string struct sub subset sys tibble top true
    tuple typeof union unlist update values vapply vec view where xor yield zip

    bayes bernoulli box cox euler fisher galton gauss gini gosset hotelling kendall laplace lasso levene likert
    markov monte newton pearson poisson ridge rubin shapiro simpson spearman student tukey turing wald welch
    weibull wilcoxon yule nash nobel ford tesla benz kelvin celsius pascal watt volt ohm hertz joule darwin
    titanic penguin adelie

    january february march april may june july august september october november december monday tuesday wednesday
    thursday friday saturday sunday

    usa uk eu uae uno nato america adelaide africa alabama alaska alexandria arizona arkansas asia athens atlanta
    austin australia austria bath belgium berlin boston brazil bristol brooklyn california cambridge canada
    carolina carolyn chad charlotte chelsea chester chicago chile china cleveland colorado columbia congo cuba
    dakota dallas delaware denver detroit diego dublin durham egypt england essex europe finland florence florida
    france francisco geneva georgia germany ghana greece guinea hamilton hampshire hawaii houston idaho illinois
    india indiana iowa iran iraq ireland israel italy jackson jamaica japan jersey jordan kansas kent kentucky
    kenya korea lancaster leon lincoln lisbon london louis louisiana lima madison maine mali malta manchester
    marino maryland melbourne memphis mexico miami michigan milan milton minnesota mississippi missouri montana
    montreal nevada nelson niger nigeria norway ohio oklahoma oman ontario oregon orlando oslo oxford panama paris
    pennsylvania peru petersburg philadelphia poland portland portugal quebec richmond rio rome russia sahara san
    santa santiago savannah scotland seattle senegal sheffield sofia somerset spain stockholm sudan surrey sweden
    sydney tennessee texas togo tokyo toledo toronto troy tunis turkey utah valencia venice vermont victoria
    vienna virginia wales warren warsaw warwick washington wellington westminster wisconsin wyoming zimbabwe

    da de del den der des di die do dos du ein el en es est et il ist ja la las le les lo los mit ne ni nu och
    oder on os para per por que sa se si su sur te tu um un una und une van vom von vor wo y za zu zum ai ax db ex
    fn fs gb hr id ii io iv js kb km lt mb ml ms ok pm py rm sh st ui vs xs
    """.split()  # noqa: SIM905  a table of a thousand strings could not be read
)
