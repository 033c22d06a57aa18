"""Ten prompts in plain English, of 50 to 1,500 tokens, as an instructor might send them. All of it is made up."""

_REPORTS = """\
The bakery on Mill Lane sells about two hundred loaves a day, and it throws away almost thirty of them every
evening. I was given the till records of one spring and asked how many loaves it should bake. At first I took the
average of all days, but a Saturday is not like a Tuesday, so the average is wrong on both of them. In this report I
look at each day of the week by itself and then at the weather.

I cleaned the data before I did anything else. Eleven rows had no date, and I removed them because there was no way
to know where they belonged. Four rows showed more than nine hundred loaves, which the oven cannot make in a day. I
think somebody typed a zero too many. I divided these by ten and marked them, so that a reader can take my
correction back.

My main result is a table with seven rows, one for each day of the week. On Mondays the bakery sells 142 loaves on
average, and on Saturdays it sells 261. The spread is large. On a wet Saturday it sold only 190, and on the day of
the spring fair it sold 340. If we bake for the average we will be wrong by more than twenty loaves on most days.

Rain matters more than I expected. I joined the sales with the records of the weather station at the school, by
date. On days with more than five millimetres of rain the bakery sold eighteen loaves fewer. The effect was the same
in March and in May, which makes me believe that it is real and not an accident of one cold week.

To choose a number I used the cost of being wrong. A loaf that is thrown away costs ninety cents, and a customer who
finds an empty shelf costs the profit of one loaf, which is two euros. So it is better to bake a little too much
than a little too little. The right number is not the average but a value that is enough on about seventy days out
of a hundred.

A weakness of my work is that I only see what was sold, and never what people wanted to buy. When the shelf was
empty at four in the afternoon, nobody wrote down who came at five. So the true demand on busy days is higher than
my numbers say. I would ask the baker to note the time at which the last loaf is gone.

The library wants to know whether its new opening hours helped. They gave us the counts of the door sensor for two
years, one number for each hour. The sensor counts people who enter and people who leave in the same way, so I
divided every number by two. I am aware that this is only right if everybody who comes in also goes out through the
same door.

Before the change the library closed at six. Now it closes at nine, from Monday to Thursday. In the year before, 410
people came on an average weekday, and in the year after it was 455. This looks like a success of eleven percent.
But the number also grew on Fridays and on Saturdays, when the hours did not change at all, by seven percent.

To find the effect of the hours alone I compared the change on the long days with the change on the other days. The
difference is four percent, or about seventeen people. A friend who studies statistics told me that this is called a
difference in differences. I computed how much this number moves if I leave out one month after the other, and it
stays between two and six percent.

I made one mistake that I want to report. In my first version I forgot that the library was closed for two weeks in
August because of the floor. The zeros of these days made the second year look worse than it was. I found it when I
drew the counts as a line, and I should have drawn that line before I computed anything.

What should the library do? Seventeen more visitors in an evening of three hours is not much, and an evening costs
two salaries. But most of the people who come after six are students, and they stay for two hours, while the
visitors of the morning stay for twenty minutes. If the library counts hours of use and not visits, then the evening
is a success.

Our group built a small program that tells ripe tomatoes from green ones in a photograph. We had two hundred
pictures from the school garden. We split them into a training set of one hundred and sixty and a test set of forty.
Then we computed the mean red, green and blue of each picture, and we drew a line between the two groups by hand.

On the training pictures the line is right in 151 cases of 160, and on the test pictures in 36 of 40. All four
mistakes are pictures that were taken in the evening, when everything looks red. We tried to correct for this by
dividing by the colour of the grey table, which is in every picture. After that only one mistake was left, but we
had looked at the test set by then, so the honest number is 36.

We also asked how few pictures would have been enough. We trained with ten, twenty, forty and eighty pictures, five
times each, with different ones. With ten pictures the result was between 60 and 90 percent. With eighty it was
always above 88. So the second half of our work with the camera was hardly needed.

The question was whether taller students jump further. We measured forty students of our year, with shoes on, in the
gym. The correlation is 0.42. One student who is very tall and plays in a club jumps much further than all others.
If we leave this one point out, the correlation falls to 0.31, and with only forty points we cannot be sure that it
is not zero.

I learned three things in this project. First, draw the data before you compute with it. Second, write down what you
remove, and why. Third, a number without a range says less than it seems to say. If I had one more week I would ask
the baker for the records of the autumn, to see whether my seven numbers still hold when the days get shorter.
"""
PARAGRAPHS = [" ".join(paragraph.split()) for paragraph in _REPORTS.split("\n\n")]

QUESTIONS = (
    ("What is a fair way to grade a report whose result is right, but whose reasons are wrong?", ()),
    ("Say in one sentence what this student did well.", (14,)),
    ("Name one weakness of this paragraph of a report.", (9,)),
    ("Write one short question that an instructor should ask this student.", (5,)),
    ("Which advice would you give to this student?", (15,)),
    ("Summarize this part of a report in two sentences.", (3, 4)),
    ("What did the group measure, and how sure can they be of the result?", (12, 13)),
    ("Explain to the student what could be improved.", (6, 7, 8)),
    ("Give friendly feedback on this report, in a few sentences.", (0, 1, 2, 3)),
    ("Read these reports of one class. What do they have in common?", tuple(range(16))),
)
PROMPTS = tuple("\n\n".join([question, *(PARAGRAPHS[number] for number in numbers)]) for question, numbers in QUESTIONS)
